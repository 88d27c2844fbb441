"""What a run is doing: phases, progress, goodput, traces, and a watchdog for one that hangs."""
