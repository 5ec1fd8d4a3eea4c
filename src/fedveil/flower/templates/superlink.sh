#!/bin/sh
# Start the SuperLink. state.db keeps what it knows: start it again, and sites come back by themselves.
cd "$$(dirname "$$0")" || exit 1
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flower-superlink --host ${listen} --port ${port} --database state.db \
  --disable-runtime-dependency-installation ${protected}
