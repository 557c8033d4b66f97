# make verify   the main job: prove the rules, visit small worlds whole, fuzz the reference engine and the newest
#               supported vLLM release, one table
# make test     the tests: fast ones first, then, two at a time, the slow ones and those that drive a real release
# make env      only the environment: .venv, with kvproof in it
# make lint     style and types
# All set up an environment of their own in .venv first and reuse it until pyproject.toml changes.
# PYTHON=/path/to/python chooses the interpreter; ARGS="--seed 7" is passed on.

.PHONY: help verify test lint env clean
ARGS ?=

help:
	@sed -n '/^$$/q; s/^# //p' Makefile

verify: env
	@.venv/bin/kvproof verify $(ARGS)

# The project folder must never be on sys.path, so pytest is run as a command and not as a module. Slow files with few
# tests are not left to the end, where one process would wait for the other.
test: env
	@.venv/bin/pytest -q -m "not slow and not release" --numprocesses 2 --dist loadfile $(ARGS)
	@.venv/bin/pytest -q -m "slow or release" --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: env
	@.ci/lint

env:
	@.ci/environment

clean:
	rm -rf .venv build reports *.egg-info
