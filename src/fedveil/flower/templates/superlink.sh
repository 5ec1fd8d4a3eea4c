#!/bin/sh
# Start the SuperLink. state.db keeps what it knows: start it again, and sites come back by themselves.
# The gate is flower-superlink of which sites reach what is for sites; all else is for this machine alone.
cd "$$(dirname "$$0")" || exit 1
. ./flower.sh
exec python3 -m fedveil.flower.flwr_private flower-superlink --host ${listen} --port ${port} --database state.db \
  --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/superlink.crt \
  --ssl-keyfile certificates/superlink.key --enable-supernode-auth \
  --disable-runtime-dependency-installation
