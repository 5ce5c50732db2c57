"""What tests share: models, feeds, launchers and cases."""
