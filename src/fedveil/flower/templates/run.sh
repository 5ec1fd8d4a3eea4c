#!/bin/sh
# Run the federation, and show what the server says. After a crash the same command resumes.
cd "$$(dirname "$$0")" || exit 1
. ./flower.sh
exec flwr run ../app federation --stream "$$@"
