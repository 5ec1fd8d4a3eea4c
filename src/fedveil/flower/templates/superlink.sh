#!/bin/sh
# Start the SuperLink. state.db keeps what it knows: start it again, and sites come back by themselves.
cd "$$(dirname "$$0")" || exit 1
. ./flower.sh
exec flower-superlink --host ${listen} --port ${port} --database state.db \
  --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/superlink.crt \
  --ssl-keyfile certificates/superlink.key --enable-supernode-auth \
  --disable-runtime-dependency-installation
