"""An artifact's scripts run one after the other, in miniature, on this machine."""
