-- What others declare is bounded: conditions and their parameters, which relay evaluates for each event.

-- Raises an error, which names what is given, for JSON that is too much for what is evaluated again and again: longer than "most"
-- characters, or with a number of more than 250 digits before or after its point.
create or replace function relay.require_bounded(given jsonb, most int, named text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
begin
    -- Numbers first: a few bytes may be 131,072 digits of text.
    if pg_column_size(given) <= 4 * most and exists (
           select from jsonb_path_query(given, 'strict $.** ? (@.type() == "number")') as n (value)
            where abs(n.value::numeric) >= 1e250 or scale(n.value::numeric) > 250) then
        raise invalid_parameter_value using
            message = format('%s: a number must have at most 250 digits before and after its point', named);
    elsif pg_column_size(given) > 4 * most or length(given::text) > most then
        raise invalid_parameter_value using message = format('%s must have at most %s characters', named, most);
    end if;
end
$$;

-- The path of a condition. Fails, in the name of a function, for text that is no path, without a variable that it has, and for what
-- costs too much to be evaluated for each event: each .** visits all that is below a value.
create or replace function relay.condition_path("where" text, params jsonb, called text) returns jsonpath
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    path  jsonpath;
    unset text;
begin
    if length("where") > 10000 then
        raise invalid_parameter_value using message = format('%s: where must have at most 10000 characters', called);
    end if;
    begin
        path := "where"::jsonpath;
    exception when others then
        raise invalid_parameter_value using message = format('%s: where is no path of SQL/JSON: %s', called, sqlerrm);
    end;
    -- What PostgreSQL prints of a path has names and texts in quotes.
    if (select count(*) from regexp_matches(regexp_replace(path::text, '"(?:[^"\\]|\\.)*"', '""', 'g'), '[.][*][*]', 'g')) > 2 then
        raise invalid_parameter_value using message = format('%s: where must have at most two .**', called);
    end if;
    perform relay.require_bounded(params, 20000, called || ': params');
    if jsonb_typeof(params) <> 'object' then
        raise invalid_parameter_value using message = format('%s: params must be an object, such as {"least": 100}', called);
    end if;
    -- Its variables are printed as $"least".
    select v.name into unset
      from regexp_matches(path::text, '([$]?)("(?:[^"\\]|\\.)*")', 'g') as token,
           lateral (select token[2]::jsonb #>> '{}') as v (name)
     where token[1] = '$' and not coalesce(params ? v.name, false);
    if found then
        raise invalid_parameter_value using message = format('%s: params: the variable %s of where is missing', called, unset);
    end if;
    return path;
end
$$;

revoke all on function relay.require_bounded(jsonb, int, text), relay.condition_path(text, jsonb, text) from public;

insert into relay.migrations (name) values ('both/002_conditions.sql') on conflict do nothing;
