"""fastdp.compat.opacus beside Opacus."""
