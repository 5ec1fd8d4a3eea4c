# For the scripts beside it: what is Flower's stays in this folder, and nothing is sent home.
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
mkdir -p flower
cat > flower/config.toml <<END
[superlink]
default = "federation"

[superlink.federation]
address = "${local}"
root-certificates = '$$PWD/certificates/ca.crt'
END
