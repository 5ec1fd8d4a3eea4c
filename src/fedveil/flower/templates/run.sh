#!/bin/sh
# Run the federation, and show what the server says. After a crash the same command resumes.
cd "$$(dirname "$$0")" || exit 1
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flwr run ../app federation --stream
