"""What routers, workers and clients share. This package imports neither torch nor `router` nor `gpu_worker`."""
