"""Times of the kernels, their byte floors and their peers: `python -m dspark_kernels.bench`."""
