"""Recipe: does training fit on a device, and with what plan."""
