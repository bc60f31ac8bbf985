"""The probe and the masks as a plugin of verl."""
