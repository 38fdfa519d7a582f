CONFIG=configs/sft.yaml
trl sft --config $CONFIG
