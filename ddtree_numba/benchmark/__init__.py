"""`ddtree bench`: every stage timed on a GPU, beside what one would take otherwise and the least that it could take."""
