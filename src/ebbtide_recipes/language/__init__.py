"""Language models for the recipes that train them: flags, loading, adapters."""
