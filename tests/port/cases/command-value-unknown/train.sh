for rate in 1e-4 2e-4; do
  trl sft --model_name_or_path Qwen/Qwen3-8B --dataset_name example/notes --learning_rate $rate \
    --output_dir out/$(date +%s)
done
