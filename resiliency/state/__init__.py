"""State trees: how they are walked, described and pickled. torch; no files, no other processes."""
