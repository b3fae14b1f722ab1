// The replication listener of pg-transactional-outbox with a handler that counts or notes.
// Source: the library's README, "Implementing the transactional outbox producer".
'use strict';

const fs = require('node:fs');
const {
  DatabaseSetup,
  createReplicationMutexConcurrencyController,
  createReplicationSegmentMutexConcurrencyController,
  getDisabledLogger,
  initializeReplicationMessageListener,
} = require('pg-transactional-outbox');

const job = JSON.parse(process.argv[2]);
const say = (said, fields) => fs.writeSync(1, `{"said": "${said}", ${JSON.stringify(fields).slice(1)}\n`);

if (job.setup) {
  const table = {
    outboxOrInbox: 'outbox', database: '', schema: 'public', table: 'outbox',
    listenerRole: 'postgres', publication: job.setup, replicationSlot: '',
  };
  console.log(DatabaseSetup.dropAndCreateTable(table));
  console.log(DatabaseSetup.setupReplicationCore(table));
  process.exit(0);
}

const arrivals = job.arrivals ? fs.openSync(job.arrivals, 'a') : undefined;
let left = job.events;
// CLOCK_REALTIME in nanoseconds: Date.now() has only milliseconds.
const clock = () => BigInt(Math.round((performance.timeOrigin + performance.now()) * 1000)) * 1000n;

const handle = async (message) => {
  if (arrivals !== undefined) fs.writeSync(arrivals, `${message.aggregateId} ${clock()}\n`);
  left -= 1;
  if (left === 0) say('done', { at: Number(process.hrtime.bigint()) / 1e9 });
};

initializeReplicationMessageListener(
  {
    outboxOrInbox: 'outbox',
    dbListenerConfig: job.connection,
    dbHandlerConfig: { ...job.connection, max: job.tuned ? 20 : 10 },
    settings: {
      dbSchema: 'public',
      dbTable: 'outbox',
      enableMaxAttemptsProtection: false,
      enablePoisonousMessageProtection: false,
      dbPublication: job.publication,
      dbReplicationSlot: job.slot,
    },
  },
  { handle },
  getDisabledLogger(),
  {
    concurrencyStrategy: job.tuned
      ? createReplicationSegmentMutexConcurrencyController()
      : createReplicationMutexConcurrencyController(),
  },
);
