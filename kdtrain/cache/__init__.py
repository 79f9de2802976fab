"""The cache: what a teacher said about a data set, kept small and checked, in HDF5."""
