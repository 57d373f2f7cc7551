"""Raw text to token files: cleaning, deduplication, removal of evaluation text and tokenization (section 4.1).

Read work_folder.py, opening.py and running.py for the stages, then the stages in order: inputs.py and reading.py;
cleaning.py with language.py; collecting.py; shingles.py, minhash.py, duplicates.py and deduplicating.py; overlap.py,
evaluation_sets.py and tokenizing.py; finalizing.py. progress.py shows how far a stage is.
"""
