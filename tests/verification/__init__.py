"""What looks and changes nothing: verify, diagnostics, calibration, accounting."""
