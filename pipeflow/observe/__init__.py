"""What a run shows of itself: counters, the run folder, the live view."""
