"""How tokens get into the store, and then to routers."""
