#!/bin/sh
# Start this site's SuperNode. What it runs is fedveil as it is installed here: bin comes first in the
# PATH, and never runs code that the server sends.
cd "$$(dirname "$$0")" || exit 1
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export PATH="$$PWD/bin:$$PATH"
exec flower-supernode --superlink ${address} --host 127.0.0.1 --port ${port} \
  --root-certificates ca.crt --auth-supernode-private-key node --node-config 'site="site.toml"'
