# Everything a newcomer needs. The work itself is done by CMake (CMakePresets.json) and by scripts/.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# One compiler may take 2 GiB, so memory bounds the jobs as well as the cores do.
JOBS ?= $(shell mem=$$(awk '/^MemTotal:/ {print int($$2 / 2097152)}' /proc/meminfo 2>/dev/null); \
	mem=$${mem:-1}; cores=$$(nproc); jobs=$$((mem < cores ? mem : cores)); echo $$((jobs > 1 ? jobs : 1)))
# How long `make fuzz` runs each fuzz target.
FUZZ_SECONDS ?= 600

.PHONY: help bootstrap build demo test test-rdma asan tsan fuzz check-bare clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

bootstrap: ## install the packages that are missing (apt; as root or with sudo)
	@scripts/bootstrap.sh
	@scripts/get_cutlass.sh

build: bootstrap ## configure and build everything that needs no GPU, in build/cpu
	cmake --preset cpu
	cmake --build --preset cpu --parallel $(JOBS)

demo: bootstrap ## build the program and watch it run GEMM + AllReduce over 2 nodes x 4 ranks
	cmake --preset cpu
	cmake --build --preset cpu --parallel $(JOBS) --target mkernel_cli
	scripts/demo.sh build/cpu

test: build ## build and run all tests
	@scripts/bootstrap.sh spin || echo "without spin the test protocol_models will be skipped"
	ctest --preset cpu --parallel $$(nproc)

# Programs for the emulated processor, which has not all instructions of this one. RDMA_PARTS are those of
# scripts/rdma_tests.sh; empty: all.
RDMA_PARTS ?=
rdma_targets = mkernel_cli net_conformance_test tests_cli_test ops_test

test-rdma: bootstrap ## verbs over software RDMA: conformance, programs, kills, speed; in a virtual machine (QEMU)
	cmake --preset rdma
	cmake --build --preset rdma --parallel $(JOBS) --target $(rdma_targets)
	@scripts/bootstrap.sh openmpi-bin perftest || echo "without openmpi-bin or perftest parts of test-rdma fail or say less"
	@status=0; scripts/rdma_vm.sh scripts/rdma_tests.sh build/rdma $(RDMA_PARTS) || status=$$?; \
	if [[ $$status -eq 77 ]]; then echo "test-rdma was SKIPPED: see above for what is missing"; exit 0; fi; exit $$status

asan tsan: %: bootstrap
	cmake --preset $*
	cmake --build --preset $* --parallel $(JOBS)
	ctest --preset $* --parallel $$(nproc)

asan: ## all tests under AddressSanitizer and UndefinedBehaviorSanitizer
tsan: ## all tests under ThreadSanitizer

fuzz: ## run each fuzz target for FUZZ_SECONDS (600) and keep what it finds in tests/corpus
	@scripts/bootstrap.sh clang libclang-rt-dev
	cmake --preset fuzz
	cmake --build --preset fuzz --parallel $(JOBS)
	scripts/fuzz.sh build/fuzz $(FUZZ_SECONDS)

check-bare: ## make demo and make test of HEAD in a fresh minimal Debian 12 (debootstrap; as root)
	scripts/check-bare.sh

clean: ## remove build/
	rm -rf build
