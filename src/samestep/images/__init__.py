"""Images to pixels. A row of an image task passes these modules, in this order:

    image_rows   labelled images of folders, tables or the Hub, held out by their content
    image_data   Images: the rows as arrays, when the model trains; crops, flips, mixup

Prepared rows have the bytes of an image, or its path; a batch has pixels.
"""
