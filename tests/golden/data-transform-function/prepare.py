def cleen(row):
    return row
