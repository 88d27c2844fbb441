"""Judges a stranger's optimizer or model beside a baseline."""
