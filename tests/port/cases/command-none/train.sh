#!/bin/bash
pip install trl
llamafactory-cli export merge.yaml
