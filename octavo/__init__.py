"""What routers, workers and clients share. Imports neither torch nor `router` nor `gpu_worker`."""
