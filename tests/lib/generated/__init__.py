"""Random typed programs: a body, options, masks and transforms, held to a plain loop over rows and steps."""
