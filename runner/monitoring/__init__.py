"""Monitors a run: phases, progress, goodput, traces, and a watchdog for hangs."""
