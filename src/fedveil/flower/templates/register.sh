#!/bin/sh
# Tell the SuperLink the sites' public keys, once; it lets nobody else in.
cd "$$(dirname "$$0")" || exit 1
. ./flower.sh
tries=0
until flwr supernode list federation > /dev/null 2>&1; do
  tries=$$((tries + 1))
  [ $$tries -lt 60 ] || { echo "error: no SuperLink at ${operators}" >&2; exit 1; }
  sleep 1
done
for key in nodes/*.pub; do
  flwr supernode register "$$key" federation --name "$$(basename "$$key" .pub)" || exit 1
done
