def clean(row):
    return row
