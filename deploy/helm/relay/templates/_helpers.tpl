{{- define "relay.labels" -}}
app.kubernetes.io/name: relay
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "relay.serviceLabels" -}}
{{ include "relay.labels" . }}
app.kubernetes.io/component: service
{{- end }}

{{- define "relay.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-slim" .Chart.AppVersion) }}
{{- end }}

{{- define "relay.pod" -}}
automountServiceAccountToken: false
# Variables of services named relay or spark-master would be taken for settings.
enableServiceLinks: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
volumes:
  - name: config
    configMap: {name: {{ .Release.Name }}}
  - name: tmp
    emptyDir: {{- toYaml .Values.tmp | nindent 6 }}
  {{- with .Values.secrets.files }}
  - name: secrets
    secret: {secretName: {{ . }}}
  {{- end }}
{{- end }}

{{- define "relay.container" -}}
image: {{ include "relay.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources: {{- toYaml .Values.resources | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/relay, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if .Values.secrets.files }}
  - {name: secrets, mountPath: /run/secrets/relay, readOnly: true}
  {{- end }}
{{- end }}

{{- define "relay.env" -}}
# A folder: each of its files is a group.
- {name: RELAY_CONFIG, value: /etc/relay}
- {name: RELAY_OBSERVE__LISTEN, value: "0.0.0.0:9464"}
{{- range $name, $key := .keys }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ $.Values.secrets.name }}, key: {{ $key }}}}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
