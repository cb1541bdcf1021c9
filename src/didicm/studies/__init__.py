"""Studies that ship, one YAML file each: `didicm study NAME`; and the published results beside them."""
