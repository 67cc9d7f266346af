"""Which pass a stage runs next: schedules, the in-flight limit, and the choice among schedules."""
