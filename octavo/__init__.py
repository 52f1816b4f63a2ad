"""The code that routers, workers and clients share. It imports neither torch nor `router` nor `gpu_worker`."""
