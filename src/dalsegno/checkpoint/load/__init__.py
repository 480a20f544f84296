"""Load a verified checkpoint onto any number of ranks: compare and prepare everything, then change the run."""
