"""The built-in prompts of `profile-hotset`: short and varied, so that no topic alone decides which experts look hot."""

from __future__ import annotations

PROMPT_MIX: tuple[str, ...] = (
    "Explain in three sentences why the sky looks blue at noon and red in the evening.",
    "Write a short, friendly mail that moves Thursday's meeting to Friday morning.",
    "What is the difference between a list and a tuple in Python? Give an example of each.",
    "A train leaves at 9:40 and arrives at 13:15. How long does the journey take?",
    "Tell a story of about eighty words in which a lighthouse keeper finds a message in a bottle.",
    "Which countries share a border with Switzerland?",
    "Translate into French: 'Could you tell me where the nearest pharmacy is?'",
    "Summarise what photosynthesis does, for a ten-year-old.",
    "Suggest a dinner for two with chickpeas, spinach and rice, and list the steps.",
    "Write a SQL query that counts the orders of each customer in the year 2024.",
    "Give me arguments for and against a four-day working week.",
    "Who was Ada Lovelace, and why is she remembered?",
    "Write a haiku about the first frost.",
    "My laptop gets hot and slow after an hour. What should I check first?",
    "Correct the grammar: 'He don't knows where they was going yesterday.'",
    "Explain compound interest with a small numerical example.",
    "Write a bash command that finds all files larger than one gigabyte below my home folder.",
    "What does a sommelier do all day?",
    "Compare jogging and swimming as exercise for someone with a sore knee.",
    "Turn this into bullet points: we need paint, two brushes, a ladder, and somebody to hold it.",
    "Was bedeutet das Sprichwort 'Morgenstund hat Gold im Mund'? Antworte auf Deutsch.",
    "Describe how a bill becomes law in a parliament, in general terms.",
    "Prove that the sum of two odd numbers is even.",
    "Give three names for a small bakery by the sea, each with one line about it.",
)
