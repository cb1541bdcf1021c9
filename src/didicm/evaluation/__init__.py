"""What a posterior is worth: the loop over a data set, metrics, intervals, calibration, conformal sets."""
