"""Settings that ship, one YAML file each: `didicm train --recipe NAME`."""
