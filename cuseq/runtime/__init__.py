"""Arrays, devices and kernels: what every operator stands on, and which knows no operator."""
