#!/bin/bash
trl sft --config sft.yaml
for seed in 1 2; do
  trl dpo --config dpo.yaml --seed $seed
done
