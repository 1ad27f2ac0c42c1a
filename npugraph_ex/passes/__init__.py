"""Passes over AOT graphs: the pipeline that runs and verifies them, and one module a pass.

Nothing here touches a device. ``pipeline.run`` is the entrance.
"""
