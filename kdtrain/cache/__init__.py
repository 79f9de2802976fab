"""The cache: what a teacher predicts for a data set, kept small and checked, in HDF5."""
