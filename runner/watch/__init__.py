"""What a run does at the moment: phases, progress, goodput, traces, and an end if it hangs."""
