#!/bin/sh
# The contract of the image postgres: POSTGRES_USER owns POSTGRES_DB on an empty volume, with POSTGRES_PASSWORD.
set -eu
data=/var/lib/postgresql/data
if [ ! -s "$data/PG_VERSION" ]; then
    printf '%s' "$POSTGRES_PASSWORD" > /tmp/password
    initdb --pgdata "$data" --username "$POSTGRES_USER" --pwfile /tmp/password --auth-host scram-sha-256 \
        --auth-local trust --encoding UTF8 --locale C.UTF-8
    rm /tmp/password
    echo 'host all all all scram-sha-256' >> "$data/pg_hba.conf"
    pg_ctl --pgdata "$data" --wait --options "-c listen_addresses=''" start
    createdb --username "$POSTGRES_USER" "$POSTGRES_DB"
    pg_ctl --pgdata "$data" --wait stop
fi
exec postgres -D "$data" -c listen_addresses='*'
