"""The commands behind `didicm`, one module each: they read arguments, call the library and print."""
