#!/usr/bin/env bash
# Coordinator, workers and Prometheus in containers: a job through the published port, every query of the dashboard.
# What is checked, and how, stands in compose_test.py. Needs Docker, docker-compose and Python 3.11; cleans up.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" deploy/compose_test.py
