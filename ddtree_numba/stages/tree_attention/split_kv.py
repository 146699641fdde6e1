MAX_SPLITS = 64
merge_splits_kernel = None
