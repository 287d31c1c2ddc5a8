"""Benchmarks on fixed workloads, each against the limit of the machine it runs on."""
