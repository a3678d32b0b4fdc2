"""What frameworks need to take fp8pass by its name; nothing here is imported unless you ask for it.

accelerate.py   `dynamo_backend="fp8pass"` of Hugging Face accelerate and the Trainers on top of it
"""
